"""`jaxtd3 new`: from an MJCF to a small package that trains.

mjcf.py      the files of a model, read from its folder alone
findings.py  what a task needs of a model: there, or missing, with the lines to add
command.py   the package, written from templates/
"""
