"""C++ kernels for one decode step or one prompt on the CPU, built on demand and called through ctypes."""
