"""Level 1: the rule check, which runs ops on local tensors and needs neither DTensors nor a process group."""
