"""Live morphing for a training that runs on Varuna's own engine."""
