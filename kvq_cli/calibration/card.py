"""The card of an artifact, its README.md: what it is, how it was made, what was measured."""

from __future__ import annotations

from collections.abc import Mapping


def card(config: Mapping, command: str) -> str:
    """Markdown, made of nothing but `config` and the command."""
    method, model, captured = config["method"], config["model"], config["captured"]
    settings, layers = config["calibration"], config["errors"]["layers"]
    options = ", ".join(f"{key}={value}" for key, value in method.items() if key != "name")
    revision = f" at revision {model['revision']}" if model["revision"] else ""
    held_out = captured["tokens_held_out"]
    rows = [f"| {index} | {_stream(layer['k'])} | {_stream(layer['v'])} |" for index, layer in enumerate(layers)]
    return "\n".join(
        [
            f"# {method['name']} for {model['name']}",
            "",
            f"A calibrated key-value cache compression of kvq for the model `{model['name']}`{revision}; "
            "it fits no other model.",
            "",
            f"- Method: {method['name']} ({options})",
            f"- Data: `{settings['dataset']}`, {settings['samples']} samples of {settings['seqlen']} tokens, "
            f"seed {settings['seed']}; {captured['tokens']:,} tokens captured, "
            f"{captured['tokens_with_gradients']:,} of them with gradients, {held_out:,} of these held out",
            f"- Size: {config['sizes']['total']:,} bytes of tensors",
            "",
            "Made by",
            "",
            f"    {command}",
            "",
            "## Measured error",
            "",
            f"Measured {config['errors']['measure']}. Then the correlation of adjacent tokens.",
            "",
            "| layer | keys: shape, fisher, plain, correlation | values: shape, fisher, plain, correlation |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _stream(measured: Mapping) -> str:
    chosen, shapes = measured["chosen"], sorted(set(measured["choice"]))
    return (
        f"{'+'.join(shapes)}, {chosen['fisher']:.4f}, {chosen['plain']:.4f}, "
        f"{measured['adjacent_token_correlation']:.2f}"
    )
