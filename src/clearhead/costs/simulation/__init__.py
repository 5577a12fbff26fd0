"""What a workload runs: the operations that PyTorch executes, laid out without running them."""
