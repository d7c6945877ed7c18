"""The processes of a run: how they start, meet, hear signals, notice a hang, and end."""
