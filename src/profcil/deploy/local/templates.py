"""The files that `profcil deploy init` writes, as templates of string.Template. `$$` stands for a dollar sign."""

from __future__ import annotations

FEDERATION = """\
# The terms that all sites agree on. docs/deployment.md describes them. Replace the examples.
modality = "text"                       # text, image, graph or table
tasks = [["cough", "fever"], ["sprain", "fracture"]]   # class names; each position of a site has one task
sites = ["north", "south"]              # one name for each site, as in its manifest.toml
length = 32                             # texts: tokens read from each
# shape = [1, 28, 28]                   # images: channels, height, width
# features = 16                         # graphs: number of features of a node
# columns = ["age", "dose"]             # tables: the columns of numbers
"""

CONTAINERFILE = """\
# An image for the server and for the sites. Build it with `podman build -t profcil .`, or by the compose files.
FROM docker.io/library/python:3.12-slim
# All machines need the same version of profcil. For a wheel of your own: COPY it to /tmp and install that file.
# For GPUs, install a torch that suits the driver before profcil.
RUN pip install --no-cache-dir 'profcil[deploy,images]==$version'
# No telemetry, no update check, no installation of packages at run time.
ENV $environment
# The process needs no rights of root. compose.yaml may name another user, who can read the keys.
USER 10001
"""

SERVER_COMPOSE = """\
# The server: `docker compose up -d` or `podman compose up -d` in this folder.
services:
  superlink:
    build:
      context: ..
      dockerfile: Containerfile
    user: "$user"              # a user who can read the keys in certs and write the run folder
    command:
      - flower-superlink
      - --ssl-ca-certfile=$certs/ca.crt
      - --ssl-certfile=$certs/server.crt
      - --ssl-keyfile=$certs/server.key
      - --enable-supernode-auth
      - --host=0.0.0.0
      - --port=$port
    environment:
      HOME: $runs              # Flower stores its state there
      FLWR_HOME: $runs/flower
    ports:
      - "$port:$port"
    volumes:                   # the app names these folders, so they have the same paths inside and outside
      - "$certs:$certs:ro"
      - "$runs:$runs"
      - "$test:$test:ro"
    restart: unless-stopped
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
"""

SERVER_UNIT = """\
# The server as a service. Copy this file to /etc/systemd/system, then: systemctl enable --now profcil-server
[Unit]
Description=Server of a profcil federation (Flower SuperLink)
Wants=network-online.target
After=network-online.target

[Service]
# A user who can read the keys and write the run folder.
User=profcil
# The virtual environment in which profcil is installed.
Environment=PATH=/opt/profcil/bin:/usr/bin:/bin
Environment=FLWR_HOME=$runs/flower
$unit_environment
ExecStart=/opt/profcil/bin/flower-superlink --ssl-ca-certfile $certs/ca.crt --ssl-certfile $certs/server.crt \\
    --ssl-keyfile $certs/server.key --enable-supernode-auth --host 0.0.0.0 --port $port
Restart=on-failure
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths=$runs

[Install]
WantedBy=multi-user.target
"""

SITE_ENV = """\
# The settings of one site, for compose.yaml and for profcil-site.service.
# The server's address. Its certificate must be valid for this name.
SUPERLINK=$host:$port
# The folder with manifest.toml and the data. The node only reads it.
SITE_FOLDER=/srv/profcil/data
# A folder with ca.crt, this site's own key (node-0, node-1, ...), renamed to node.key, and allowed-apps.txt: the
# digests of the apps that this site runs, one a line.
KEY_FOLDER=/etc/profcil
"""

SITE_COMPOSE = """\
# One site: `docker compose --env-file site.env up -d` in this folder. No port is opened.
services:
  node:
    build:
      context: ..
      dockerfile: Containerfile
    user: "$user"              # a user who can read the site's folder and its key
    command:
      - profcil-supernode      # Flower's flower-supernode, which runs only the apps on the list
      - --allow-apps=/keys/allowed-apps.txt
      - --superlink=$${SUPERLINK}
      - --root-certificates=/keys/ca.crt
      - --auth-supernode-private-key=/keys/node.key
      - --node-config=site="/site" home="/state"
    environment:
      HOME: /state
      FLWR_HOME: /state/flower
    volumes:
      - "$${SITE_FOLDER}:/site:ro"
      - "$${KEY_FOLDER}:/keys:ro"
      - "state:/state"         # received blocks and private tensors
    read_only: true
    tmpfs: [/tmp]
    restart: unless-stopped
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
volumes:
  state:
"""

SITE_UNIT = """\
# One site as a service. Copy this file to /etc/systemd/system and site.env to /etc/profcil, then:
# systemctl enable --now profcil-site; journalctl -fu profcil-site shows what it does.
[Unit]
Description=Site of a profcil federation (Flower SuperNode)
Wants=network-online.target
After=network-online.target

[Service]
# A user who can read the site's folder and its key, and nothing else that is secret.
User=profcil
EnvironmentFile=/etc/profcil/site.env
# The virtual environment in which profcil is installed.
Environment=PATH=/opt/profcil/bin:/usr/bin:/bin
Environment=HOME=/var/lib/profcil
Environment=FLWR_HOME=/var/lib/profcil/flower
$unit_environment
StateDirectory=profcil
# Flower's flower-supernode, which runs only the apps on the list.
ExecStart=/opt/profcil/bin/profcil-supernode --allow-apps $${KEY_FOLDER}/allowed-apps.txt \\
    --superlink $${SUPERLINK} --root-certificates $${KEY_FOLDER}/ca.crt \\
    --auth-supernode-private-key $${KEY_FOLDER}/node.key \\
    --node-config 'site="$${SITE_FOLDER}" home="/var/lib/profcil/sites"'
Restart=on-failure
NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict

[Install]
WantedBy=multi-user.target
"""

FLOWER_CONFIG = """\
# Flower's configuration of the operator: copy it to ~/.flwr/config.toml, or set FLWR_HOME to this folder.
[superlink]
default = "deployment"

[superlink.deployment]
address = "$host:$port"
root-certificates = "$certs/ca.crt"
"""

README = """\
# A deployment of profcil

These files are templates: read each of them before you use it. The containers and services were not started by the
program that wrote them. certs/ is for tests; use certificates of your organisation in production.

1. federation.toml: the terms of all sites. $federation_note
2. Each site: write manifest.toml beside the data, and test it:
   `profcil deploy check SITE --federation federation.toml`.
3. Try it in one process, if you have data for it:
   `profcil run --federation federation.toml --sites SITE ... --test TEST`.
4. The app, for the server: $app_note
5. The server: start server/compose.yaml or server/profcil-server.service.
6. Register the nodes' public keys, once for each:
   `FLWR_HOME=$folder/server flwr supernode register certs/node-0.pub deployment`.
7. Give each site the folder site/, the Containerfile, certs/ca.crt and its own certs/node-N (as node.key), and the
   folder app/ to read, nothing else. `profcil deploy check SITE --federation app` prints the app's digest, which the
   site writes into allowed-apps.txt beside its key. It fills in site.env and starts site/compose.yaml or
   site/profcil-site.service.
8. Begin: `FLWR_HOME=$folder/server flwr run app deployment`. `profcil status $runs/deployed` shows how it goes.

docs/deployment.md says what is sent and what the limits are.
"""
