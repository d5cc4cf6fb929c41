"""Training on several ranks under ``torchrun``: joining them, batch norm of all, forward passes of a rank's rows."""
