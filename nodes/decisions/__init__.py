"""Records of decisions about placement and scale, with the snapshots that the decisions read."""
