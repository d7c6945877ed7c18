"""Pictures of measurements and of runs, the page and the wandb workspace."""
