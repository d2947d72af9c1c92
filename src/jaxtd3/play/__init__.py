"""`jaxtd3 play`: a policy live in C MuJoCo, in real time, in a browser or a window.

session.py    one environment that is stepped by the clock, and what a person asks of it
scene.py      the robot's shapes as triangles, sent to the browser once
server.py     the page and its few requests, over HTTP
window.py     MuJoCo's own viewer, where there is a display
"""
