"""``tanghulu store tenants | token``: usage by tenant, and tokens for the tokens file."""

from __future__ import annotations

import click

from tanghulu.auth.tenants import Right, hash_of, new_token, validate_tenant
from tanghulu.cli.printing import print_json, print_table, store_options
from tanghulu.masters import Masters
from tanghulu.store.admin.rows import plain
from tanghulu.store.client import connect
from tanghulu.store.client.model import TenantView
from tanghulu.types import format_size


@click.command(short_help="What each tenant holds and may hold.")
@store_options
def tenants(master: Masters, as_json: bool) -> None:
    """List what each tenant holds in the memory of all nodes, and its hits, misses and evictions since their start.

    "share" is of the memory of all nodes; a quota is said for one node, for all of them together, or both. A tenant's
    own token tells of that tenant only.
    """
    with connect(master) as store:
        found = store.tenants()
    if as_json:
        print_json([plain(each) for each in found])
        return
    rows = (
        (
            each.tenant or "(none)",
            format_size(each.used_bytes),
            f"{each.share:.1%}",
            _quota(each),
            each.num_chunks,
            each.hits,
            each.misses,
            each.evictions,
        )
        for each in found
    )
    print_table(("tenant", "used", "share", "quota", "chunks", "hits", "misses", "evictions"), rows)


def _quota(tenant: TenantView) -> str:
    said = []
    if tenant.quota_bytes:
        said.append(f"{format_size(tenant.quota_bytes)} a node")
    if tenant.cluster_quota_bytes:
        filled = tenant.used_bytes / tenant.cluster_quota_bytes
        said.append(f"{format_size(tenant.cluster_quota_bytes)} in all ({filled:.0%} used)")
    return ", ".join(said) or "-"


@click.command(short_help="Make a token for the tokens file.")
@click.argument("name")
@click.option("--tenant", default="", help="whose token it is; default: an operator's")
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice([right.value for right in Right]),
    help="what it allows; may be said several times [default: read and write; an operator's: admin]",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
def token(name: str, tenant: str, rights: tuple[str, ...], as_json: bool) -> None:
    """Make a token and the lines about it for the tokens file, which keeps its hash only. Nothing is stored.

    NAME stands in logs and messages. Give the token to its user now: it cannot be shown again.
    """
    if tenant:
        validate_tenant(tenant)
        if Right.ADMIN.value in rights:
            raise click.UsageError("admin sees all tenants: leave --tenant out")
    chosen = rights or ((Right.READ.value, Right.WRITE.value) if tenant else (Right.ADMIN.value,))
    made = new_token()
    if as_json:
        row = {"name": name, "tenant": tenant, "rights": list(chosen), "sha256": hash_of(made)}
        print_json({"token": made, "entry": {key: value for key, value in row.items() if value}})
        return
    click.echo(made)
    lines = ["[[tokens]]", f'name = "{name}"', f'tenant = "{tenant}"' if tenant else ""]
    lines += ["rights = [" + ", ".join(f'"{right}"' for right in chosen) + "]", f'sha256 = "{hash_of(made)}"']
    click.echo("\n" + "\n".join(filter(None, lines)), err=True)


COMMANDS = (tenants, token)
