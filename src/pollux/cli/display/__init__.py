"""How results look in a terminal: tables, numbers, progress, screens. Imports `client` for types."""
