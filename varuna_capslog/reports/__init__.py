"""One page on what a run did (`page.write_report`), its pictures, and those of plans, comparisons and replays.

Reads what a run wrote, never imports torch or a workload, and changes nothing outside the folder it is given.
"""
