"""The simulator: the controller's first driver, with a virtual clock and simulated jobs."""
