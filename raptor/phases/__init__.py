"""Where depth falls into phases: similarity of layers, cuts, evidence, and cuts by what blocks do."""
