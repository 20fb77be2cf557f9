"""The laboratory beside the product, outside of the wheel; run a module as `python -m lab.pages.cli`.

studies/   studies made once, whose numbers docs/METHOD.md and docs/REPRODUCTION.md quote
claims/    the papers' claims (claims.yaml), checked by expressions over results of `kvq reproduce`
goals/     the project's own goals, compared with results
pages/     generators of the pages and pictures of docs/
"""
