"""Plans of planners that say on which ranks each stage stands: `replicated` gives a stage several, `periodic` gives a
rank several stages. `equal_pipelines` repeats a plan of planner `budget` for several pipelines, and `whole_runs` weighs
branches and replicas beside its line.
"""
