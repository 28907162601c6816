"""What trainers write around weights: optimizers, schedulers, random states, in files and folders of their own."""
