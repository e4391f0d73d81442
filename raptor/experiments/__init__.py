"""One file per table or figure of the paper, each run by `raptor reproduce NAME`.

An experiment is a function `run(...)` with typed options; it writes JSON, a table and a figure into its folder, and
`raptor reproduce list` shows its one-line description.
"""
