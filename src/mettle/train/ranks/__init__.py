"""Training on several ranks under ``torchrun``: batch norm of all, forward passes of a rank's rows."""
