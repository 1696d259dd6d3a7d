"""What is asked about a plan before the run: a simulated step, all planners side by side, another number of devices.

Stands above the planners and below everything that computes; no torch.
"""
