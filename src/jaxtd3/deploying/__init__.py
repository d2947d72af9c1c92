"""From a policy to a robot: a controller in one file, and how it fares in worlds it has not seen.

robot.py            what a controller must know of a robot: joints, gains, sensors, gait
controller.py       the controller in NumPy: observation and state, as the environment makes them
controller_onnx.py  the same as one ONNX graph
trace.py            200 recorded steps, so that any runtime can test itself
package.py          `jaxtd3 export --controller` and `--check`
worlds.py           worlds that differ from the training environment
robustness.py       episodes of a controller in many worlds at once, in C MuJoCo
"""
