"""What this machine does: measured rates of its kernels, and predictions made from them."""
