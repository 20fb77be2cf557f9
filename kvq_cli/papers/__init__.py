"""The papers' tables, figures and claims: what is run for each, and what came out."""
