"""Plans that place stages on ranks: with replicas of a stage, several stages per rank, or several equal pipelines."""
