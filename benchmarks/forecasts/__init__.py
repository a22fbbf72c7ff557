"""Forecasts in every situation, against as many fewer steps."""
