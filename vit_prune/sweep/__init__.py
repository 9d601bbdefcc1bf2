"""Many methods at many strengths on one model and one data set: one CSV, one picture of the frontier."""
