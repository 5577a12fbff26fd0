"""Models on disk: every reader and writer of weights, each strict about its file.

opened = clearhead.checkpoint.load.open_model("smollm2")
"""
