"""Models on disk: every reader and writer of weights, each strict about its file.

loaded = clearhead.checkpoint.load.open_model("smollm2")
"""
