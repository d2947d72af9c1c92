"""What a run leaves behind: its folder, logs, plots, report, video, ONNX."""
