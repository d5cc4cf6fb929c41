"""Small pages of the service's own: no script, style or font comes from elsewhere."""

import html
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }}
body {{ max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
h2 {{ font-size: 1.05rem; margin: 2rem 0 .25rem; font-family: ui-monospace, monospace }}
table {{ border-collapse: collapse }} td {{ padding: .1rem 1rem .1rem 0; vertical-align: top }}
code {{ font-family: ui-monospace, monospace }}
input, button {{ font: inherit; padding: .4rem .6rem; margin: .3rem .3rem 0 0 }} input {{ width: min(100%, 28rem) }}
</style></head><body>
{body}
</body></html>
"""

UNKNOWN_KEY = (
    "this key is not known here, or it has expired: check that all of it was pasted, or ask whoever runs this service "
    "for a new one"
)
OTHER_KEY = (
    "this key is not for the workbench: ask whoever runs this service for one that was made with --scope workbench"
)
SIGN_IN_SCRIPT = """"use strict";
document.getElementById("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = document.getElementById("said");
  const key = document.getElementById("key").value.trim();
  if (!/^[!-~]+$/.test(key)) {  // a browser sends no other characters, and a key has none
    said.textContent = "This is not a key: a key is one line that begins with mettle_. Paste it again.";
    return;
  }
  said.textContent = "Signing in …";
  try {
    const answer = await fetch("/workbench/session", {
      method: "POST", headers: { Authorization: "Bearer " + key }, credentials: "same-origin",
    });
    if (answer.ok) { location.reload(); return; }
    const message = (await answer.json()).error.message;
    const wait = answer.headers.get("Retry-After");
    said.textContent =
      message[0].toUpperCase() + message.slice(1) + "." + (wait ? " Try again in " + wait + " s." : "");
  } catch { said.textContent = "The service does not answer. Is it still running?"; }
});
"""


def sign_in_page() -> str:
    """Ask for a key, once per browser session."""
    body = """<h1>mettle workbench</h1>
<form id="sign-in"><label for="key">A key with the scope <code>workbench</code></label><br>
<input id="key" type="password" autocomplete="off" required><button>Sign in</button>
<p id="said" role="status"></p></form>
<script src="/sign-in.js"></script>"""
    return _PAGE.format(title="mettle: sign in", body=body)


def reference_page(schema: dict[str, Any]) -> str:
    """The API on one page, from its OpenAPI schema."""
    parts = ["<h1>mettle service</h1>", f"<p>{html.escape(schema['info']['description'])}</p>"]
    parts.append('<p>For programs: <a href="/openapi.json">openapi.json</a></p>')
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(route['description'])}</p>")
            parts.append(_body_table(route.get("requestBody", {}).get("content", {})))
            rows = "".join(
                f"<tr><td><code>{html.escape(status)}</code></td><td>{html.escape(answer['description'])}</td></tr>"
                for status, answer in route["responses"].items()
            )
            parts.append(f"<table>{rows}</table>")
    return _PAGE.format(title="mettle service", body="\n".join(parts))


def _body_table(content: dict[str, Any]) -> str:
    rows = []
    for kind, told in content.items():
        shape = told["schema"]
        for name, field in shape.get("properties", {}).items():
            needed = "" if name in shape.get("required", ()) else " (optional)"
            said = field.get("description", field.get("type", ""))
            rows.append(
                f"<tr><td>{html.escape(kind)}</td><td><code>{html.escape(name)}</code>{needed}</td>"
                f"<td>{html.escape(str(said))}</td></tr>"
            )
    return f"<table>{''.join(rows)}</table>" if rows else ""
