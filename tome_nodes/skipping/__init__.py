"""Which steps of a run are skipped.

In a shallow step, only the outermost blocks of a UNet run, and what the others gave is kept. In a
forecast step, the model does not run, and its answer is extrapolated from two others.
"""
