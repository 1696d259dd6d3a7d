"""The plan file: which layers each stage has, where the stages run, and what they are predicted to cost.

Plain data without torch. Planners make plans, the engine runs them; neither is known here.
"""
