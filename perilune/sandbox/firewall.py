"""What may leave a guest's namespace, as nftables rules: allowed ranges first, then denied ones, then every private
range, then the internet if the sandbox has it."""

import ipaddress

from perilune.sandbox.catalogue import Network
from perilune.sandbox.errors import InvalidRequest

GUEST, GATEWAY = "169.254.77.2", "169.254.77.1"
PRIVATE = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
)  # fmt: skip
UPLINK = ipaddress.ip_network("10.213.0.0/16")  # between namespaces and host; /30 each
HTTP, TLS = 18080, 18443


def split(entries: list[str]) -> tuple[list[str], list[str]]:
    """(CIDRs, domains); InvalidRequest for what is neither."""
    ranges, domains = [], []
    for entry in entries:
        try:
            ranges.append(str(ipaddress.IPv4Network(entry, strict=False)))
        except ValueError:
            name = entry.removeprefix("*.")
            if not name or not all(part and part.replace("-", "").isalnum() for part in name.split(".")):
                raise InvalidRequest(f"{entry!r} is neither an IPv4 range nor a domain") from None
            domains.append(entry.lower())
    return ranges, domains


def public(address: str) -> bool:
    """Not in any private range."""
    found = ipaddress.ip_address(address)
    return found.version == 4 and not any(found in ipaddress.ip_network(r) for r in PRIVATE)


def rules(network: Network) -> str:
    """The namespace's nftables ruleset."""
    allow, domains = split(network.allow)
    deny, _ = split(network.deny)
    accept = f"ip daddr {{ {', '.join(allow)} }} accept" if allow else ""
    drop = f"ip daddr {{ {', '.join(deny)} }} drop" if deny else ""
    aside = f"ip daddr != {{ {', '.join(allow)} }}" if allow else ""
    divert = ""
    if domains:
        divert = (
            f'iifname "tap0" {aside} tcp dport 80 redirect to :{HTTP}\n'
            f'iifname "tap0" {aside} tcp dport 443 redirect to :{TLS}'
        )
    return f"""
flush ruleset
table ip perilune {{
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    {accept}
    {drop}
    ip daddr {{ {", ".join(PRIVATE)} }} drop
    {'iifname "tap0" oifname "wan0" accept' if network.internet else ""}
  }}
  chain input {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "tap0" ip daddr {GATEWAY} udp dport 53 accept
    iifname "tap0" tcp dport {{ {HTTP}, {TLS} }} {"accept" if domains else "drop"}
  }}
  chain before {{
    type nat hook prerouting priority -100;
    {divert}
  }}
  chain after {{
    type nat hook postrouting priority 100;
    oifname "wan0" masquerade
  }}
}}
"""


# `reach` outlives the reload of the chains: which link may reach which address of the host itself.
HOST_RULES = f"""
table ip perilune_host {{
  set reach {{ type ifname . ipv4_addr; }}
  chain input {{ type filter hook input priority -10; policy accept; }}
  chain forward {{ type filter hook forward priority -10; policy accept; }}
  chain after {{ type nat hook postrouting priority 100; policy accept; }}
}}
flush chain ip perilune_host input
flush chain ip perilune_host forward
flush chain ip perilune_host after
table ip perilune_host {{
  chain input {{
    iifname "pl*" ct state established,related accept
    iifname . ip daddr @reach accept
    iifname "pl*" drop
  }}
  chain forward {{
    iifname "pl*" oifname "pl*" drop
  }}
  chain after {{
    ip saddr {UPLINK} oifname != "pl*" masquerade
  }}
}}
"""
