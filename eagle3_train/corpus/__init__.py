"""Conversations to token ids and loss masks."""
