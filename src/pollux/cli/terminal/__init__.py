"""What holds for everything that is printed: signs that the terminal cannot show, or must not obey, are written out.

Used by every other package of the command line. Imports none of them.
"""
