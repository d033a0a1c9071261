"""The commands of `pollux`, one module for each noun. Imports every other part of the room."""
