"""Membership that changes while a run goes on: generations, the protocol that founds them, recovery and copies.

So far the pure part: functions on data that decide what happens, and the rig that proves them. Nothing here imports
torch.
"""
