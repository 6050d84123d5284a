"""Experiments on top of the library: data, models, presets, runs, records, figures, reports."""
