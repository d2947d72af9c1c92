"""From a policy to a robot: a controller in one file, and how it fares in worlds it has not seen.

robot.py            what a controller must know of a robot: joints, gains, sensors, gait
controller.py       the controller in NumPy: observations and state, as in the environment
controller_onnx.py  the same as one ONNX graph
runtime.py          a controller in onnxruntime
trace.py            200 recorded steps, so that any runtime can test itself
package.py          `jaxtd3 export --controller` and `--check`
model_file.py       the robot's physics as one MuJoCo file
worlds.py           worlds that differ from the training environment
robustness.py       episodes of a controller in many worlds at once, in C MuJoCo
evaluate.py         the same at every evaluation of a run (`--best robust`)
"""
