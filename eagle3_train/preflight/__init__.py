"""Checks that run before anything is spent: static, arithmetic and live."""
