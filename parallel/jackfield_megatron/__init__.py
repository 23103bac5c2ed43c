"""Training on Megatron-Core: TP, PP, VPP, SP, CP, EP and the distributed optimizer behind one backend, `megatron`."""
