"""The report page of a run (`page.write_report`), its pictures, and those of plans, comparisons and replays.

Reads the files of a run, never imports torch or a workload, and changes nothing outside the run's folder.
"""
