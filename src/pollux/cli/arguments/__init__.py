"""How options are read, and the files and folders that they name. Imports `client`."""
