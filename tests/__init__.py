"""The tests of the library and the workload, and `rig`, the programs that prove them."""
