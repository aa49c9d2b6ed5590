#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders every overlay and component of deploy/k8s with kustomize.py, and with kubectl 1.27 or later if
there is one: both must agree. Checks that no server is published without TLS and tokens or reachable
without Envoy, that probes, drains, idle connections and memory fit together, that compose stops servers before
Envoy, and validates the manifests strictly: an unknown field is an error. Shows first that it catches planted errors. Without python3-yaml
the test is skipped; without `pip install kubernetes-validate` manifests are not validated.

    deploy/test/manifests.py [--kubernetes 1.31] [--crds DIRECTORY]

Custom resources are validated against the CustomResourceDefinitions in DIRECTORY, YAML files as
their projects publish them (or `kubectl get crds -o yaml`). Without it they are only rendered.
"""

import argparse
import copy
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

try:
    import yaml
except ImportError:
    print("skipped: there is no python3-yaml")
    sys.exit(77)
import kustomize

try:
    import jsonschema
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "deploy" / "k8s"

# A component as an overlay would use it.
WITH_COMPONENT = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../overlays/cpu-demo]
components: [../components/{name}]
"""

# Methods for operators only: they change the models or list the services. All other methods of the
# protos are for clients.
INSIDE = {
    "/denoised.v1.ModelAdmin/LoadModel",
    "/denoised.v1.ModelAdmin/UnloadModel",
    "/denoised.v1.ModelAdmin/SetAlias",
    "/denoised.v1.ModelAdmin/DeleteAlias",
    "/inference.GRPCInferenceService/RepositoryModelLoad",
    "/inference.GRPCInferenceService/RepositoryModelUnload",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/any.other.Service/Method",
}
# The same of the HTTP port.
INSIDE_HTTP = {
    "POST /v1/models",
    "DELETE /v1/models/digits@2",
    "PUT /v1/aliases/digits@2",
    "DELETE /v1/aliases/digits@2",
    "GET /metrics",
    "GET /v1/models/digits@2/other",
    "GET /v1/other",
    "GET /other",
}
# What gives a server an address outside the cluster.
PUBLIC_KINDS = {"Gateway", "GRPCRoute", "HTTPRoute", "TLSRoute", "TCPRoute", "Ingress"}
# How often a server may take each of its bounds of memory: messages that are read and uploads over HTTP share a
# second one, and links to results have one. The others are bounds of one request, within these.
MEMORY_BOUNDS = {
    "--max-buffered-bytes": 2,
    "--max-decoding-bytes": 1,
    "--max-queued-bytes": 1,
    "--max-kept-job-bytes": 2,
    "--max-request-bytes": 0,
    "--max-tensor-bytes": 0,
    "--max-reply-bytes": 0,
}
# For weights, activations and what allocators lose.
MEMORY_ROOM = 3 << 29
# A drain has so much more after its grace period: to flush, to end calls, and for gRPC's shutdown (Server::Drain).
DRAIN_END_SECONDS = 3


def render(directory):
    """The resources that kubectl would apply."""
    resources = kustomize.render(directory)
    if shutil.which("kubectl"):
        result = subprocess.run(
            ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise SystemExit(f"{directory}: {result.stderr.strip()}")
        if by_name(resources) != by_name(without_hashes(result.stdout)):
            raise SystemExit(f"{directory}: deploy/test/kustomize.py renders it otherwise than kubectl")
    return resources


def without_hashes(text):
    """kubectl's resources. It ends names of ConfigMaps in a hash of their contents."""
    for document in yaml.safe_load_all(text):
        name = document["metadata"]["name"]
        if document["kind"] == "ConfigMap" and re.fullmatch(r".*-[0-9a-z]{10}", name):
            text = text.replace(name, name[:-11])
    return list(yaml.safe_load_all(text))


def by_name(resources):
    """The resources in an order of their own, and all lists of named elements, too."""
    def ordered(value):
        if isinstance(value, dict):
            return {key: ordered(inner) for key, inner in value.items()}
        if not isinstance(value, list):
            return value
        for key in ("name", "mountPath"):
            if all(isinstance(item, dict) and key in item for item in value):
                return sorted(map(ordered, value), key=lambda item: str(item[key]))
        return [ordered(item) for item in value]

    return {(r["kind"], r["metadata"]["name"]): ordered(r) for r in resources}


def strict(schema):
    """An OpenAPI schema of a CustomResourceDefinition as a JSON schema without unknown fields."""
    if isinstance(schema, list):
        return [strict(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: strict(value) for key, value in schema.items()}
    closed = isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields") and "type" in schema:
        result["additionalProperties"] = False
    return result


def read_crds(directory):
    """(apiVersion, kind) to JSON schema, of every definition in the directory."""
    schemas = {}
    for file in sorted(pathlib.Path(directory).glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            items = document.get("items", [document]) if document else []
            for crd in (item for item in items if item.get("kind") == "CustomResourceDefinition"):
                for version in crd["spec"]["versions"]:
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}  # the API server's own
                    name = f"{crd['spec']['group']}/{version['name']}"
                    schemas[name, crd["spec"]["names"]["kind"]] = schema
    return schemas


class Validator:
    def __init__(self, kubernetes, crds):
        self.kubernetes = kubernetes
        self.crds = crds

    def complaint(self, resource):
        """What is wrong with a resource, None if nothing is, or "unknown" without a schema."""
        if not kubernetes_validate:
            return "unknown"
        try:
            kubernetes_validate.validate(resource, self.kubernetes, strict=True)
            return None
        except kubernetes_validate.ValidationError as error:
            return f"{'.'.join(str(part) for part in error.path)}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            pass
        schema = self.crds.get((resource["apiVersion"], resource["kind"]))
        if schema is None:
            return "unknown"
        errors = list(jsonschema.Draft202012Validator(schema).iter_errors(resource))
        return f"{errors[0].json_path}: {errors[0].message[:300]}" if errors else None


def plant(resources, kind, path, value):
    """A copy of the first resource of this kind, with a value that is wrong."""
    resource = copy.deepcopy(next(r for r in resources if r["kind"] == kind))
    at = resource
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return resource


def is_published(resources):
    return any(
        resource["kind"] in PUBLIC_KINDS
        or resource["kind"] == "Service" and resource["spec"].get("type") in ("LoadBalancer", "NodePort")
        for resource in resources
    )


def methods():
    """The paths of all methods of the repository's protos, and of the health service."""
    paths = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
    for file in (ROOT / "proto").rglob("*.proto"):
        text = file.read_text(encoding="utf-8")
        package = re.search(r"^package ([\w.]+);", text, re.MULTILINE).group(1)
        service = ""
        for kind, name in re.findall(r"^\s*(service|rpc) (\w+)", text, re.MULTILINE):
            if kind == "service":
                service = name
            else:
                paths.add(f"/{package}.{service}/{name}")
    return paths


def http_calls():
    """What the HTTP port has, "GET /v1/server", and the files of the page."""
    text = (ROOT / "server" / "http" / "http_api.cc").read_text(encoding="utf-8")
    routes = re.findall(r'\{"([A-Z]+)",\s+"(/[^"]*)"', text)
    calls = {f"{method} {re.sub('{[a-z_]+}', 'digits@2', path)}" for method, path in routes}
    files = {file.name for file in (ROOT / "server" / "http" / "page").iterdir()}
    calls |= {f"GET /{name}" for name in files} | {"GET /", "HEAD /v1/models", "OPTIONS /v1/generate"}
    return calls - {"GET /index.html"}


def envoy_matches(match, path, method):
    """Whether a matcher of Envoy matches. One that is unknown here does."""
    if "path" in match:
        matches = match["path"] == path
    elif "safe_regex" in match:
        matches = re.fullmatch(match["safe_regex"]["regex"], path) is not None
    else:
        matches = path.startswith(match.get("prefix", ""))
    for header in match.get("headers", []):
        wanted = header.get("string_match", {}).get("safe_regex", {}).get("regex")
        if header["name"] == ":method" and wanted and not re.fullmatch(wanted, method):
            return False
    return matches


def envoy_forwards(routes, path, method="POST"):
    """Whether the first route that matches forwards."""
    for entry in routes:
        if envoy_matches(entry["match"], path, method):
            return "route" in entry
    return False


def gateway_forwards(route, path):
    _, service, method = path.split("/")
    for rule in route["spec"]["rules"]:
        for match in rule.get("matches", [{}]):
            wanted = match.get("method", {})
            exact = wanted.get("type", "Exact") == "Exact"
            if not exact or (
                wanted.get("service", service) == service and wanted.get("method", method) == method
            ):
                return True
    return False


def misrouted(who, forwards, inside, everything):
    """Complaints about calls that get through and should not, or should and do not."""
    return [f"{who} forwards {call}, which is not for strangers" for call in sorted(inside) if forwards(call)] + [
        f"{who} does not forward {call}" for call in sorted(everything - inside) if not forwards(call)
    ]


def http_route_forwards(route, call):
    """For the matches that an HTTPRoute may have: path and method."""
    method, path = call.split(" ")
    for rule in route["spec"]["rules"]:
        for match in rule.get("matches", [{}]):
            wanted = match.get("path", {})
            value, kind = wanted.get("value", "/"), wanted.get("type", "PathPrefix")
            fits = {
                "Exact": path == value,
                "PathPrefix": path == value or path.startswith(value.rstrip("/") + "/"),
                "RegularExpression": re.fullmatch(value, path) is not None,
            }[kind]
            if fits and match.get("method", method) == method and "headers" not in match:
                return True
    return False


def connection_managers(envoy):
    """Address, HttpConnectionManager and cluster address of each listener: port, manager, target."""
    resources = envoy["static_resources"]
    targets = {}
    for cluster in resources["clusters"]:
        address = next(find(cluster["load_assignment"], "socket_address"))
        targets[cluster["name"]] = f"{address['address']}:{address['port_value']}"
    for listener in resources["listeners"]:
        port = listener["address"]["socket_address"]["port_value"]
        for config in find(listener, "typed_config"):
            if "route_config" in config:
                names = {route["cluster"] for route in find(config, "route")}
                yield port, config, {targets[name] for name in names}


def envoy_complaints(envoy, settings):
    complaints, ports = [], {}
    for port, manager, targets in connection_managers(envoy):
        http = manager["stat_prefix"] == "http"
        ports[port] = manager["stat_prefix"]
        listen = settings.get("DENOISED_HTTP_LISTEN" if http else "DENOISED_LISTEN", "")
        if targets != {listen}:
            complaints.append(f"Envoy's port {port} forwards to {sorted(targets)}, but the server listens on {listen!r}")
        for limit in ("max_request_headers_kb", "request_headers_timeout"):
            if limit not in manager:
                complaints.append(f"Envoy's port {port} has no {limit}")
        if any(route.get("timeout") != "0s" for route in find(manager, "route")):
            complaints.append(f"a route of Envoy's port {port} cuts off calls that take long")
        for routes in find(manager, "routes"):
            if http:
                complaints += misrouted(
                    "Envoy", lambda call: envoy_forwards(routes, call.split(" ")[1], call.split(" ")[0]),
                    INSIDE_HTTP, http_calls(),
                )
            else:
                complaints += misrouted("Envoy", lambda path: envoy_forwards(routes, path), INSIDE, methods())
    if ports != {50051: "grpc", 8080: "http"}:
        complaints.append(f"Envoy listens on {ports}")
    sockets = len(list(find(envoy, "transport_socket")))
    encrypted = bool(settings.get("DENOISED_TLS_CERT"))
    if sockets != (4 if encrypted else 0):  # to and from Envoy, for each of the two ports
        complaints.append("Envoy and the server disagree on TLS")
    return complaints


def port_complaints(resources):
    """What is routed to, opened or named must be a port of Envoy."""
    complaints = []
    ports = {"grpc": 50051, "http": 8080, "metrics": 9090}
    services = {r["metadata"]["name"]: r for r in resources if r["kind"] == "Service"}
    for name, service in services.items():
        has = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        if any(ports.get(port) != number for port, number in has.items()):
            complaints.append(f"Service {name} has the ports {has}")
        if name == "denoised" and set(has) != set(ports):
            complaints.append(f"Service {name} has no port {sorted(set(ports) - set(has))}")
    for policy in (r for r in resources if r["kind"] == "NetworkPolicy" and r["metadata"]["name"] == "denoised"):
        opened = [sorted(port["port"] for port in rule["ports"]) for rule in policy["spec"]["ingress"]]
        if opened != [[8080, 50051], [9090]]:
            complaints.append(f"NetworkPolicy opens {opened}, not gRPC and HTTP to clients and metrics to monitoring")
    for deployment in (r for r in resources if r["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        containers = pod.get("initContainers", []) + pod["containers"]
        has = {port["name"]: port["containerPort"] for c in containers for port in c.get("ports", [])}
        if has != ports:
            complaints.append(f"the pod has the ports {has}")
    for kind, port in (("GRPCRoute", "grpc"), ("HTTPRoute", "http")):
        for route in (r for r in resources if r["kind"] == kind):
            backends = {(b["name"], b["port"]) for rule in route["spec"]["rules"] for b in rule["backendRefs"]}
            if backends != {("denoised", ports[port])}:
                complaints.append(f"{kind} leads to {sorted(backends)}")
            if {parent.get("sectionName") for parent in route["spec"]["parentRefs"]} != {port}:
                complaints.append(f"{kind} is not of the listener {port} alone")
    for policy in (r for r in resources if r["kind"] == "BackendTLSPolicy"):
        named = {target.get("sectionName") for target in policy["spec"]["targetRefs"]}
        if named != {"grpc", "http"}:
            complaints.append(f"BackendTLSPolicy is of the ports {sorted(map(str, named))}, not of grpc and http")
    for gateway in (r for r in resources if r["kind"] == "Gateway"):
        listeners = [(each["port"], each.get("hostname")) for each in gateway["spec"]["listeners"]]
        if len(set(listeners)) != len(listeners):
            complaints.append("two listeners of the gateway have one name and port: they take either kind of route")
    return complaints


def exposure(resources):
    """What lets somebody reach the server who should not: complaints about all resources of one
    deployment."""
    complaints = []
    settings, envoys = {}, []
    for resource in (r for r in resources if r["kind"] == "ConfigMap"):
        data = resource.get("data", {})
        settings.update({key: value for key, value in data.items() if key.startswith("DENOISED_")})
        if "envoy.yaml" in data:
            envoys.append(yaml.safe_load(data["envoy.yaml"]))
    if is_published(resources):
        kinds = {resource["kind"] for resource in resources}
        for name in ("DENOISED_TLS_CERT", "DENOISED_TLS_KEY", "DENOISED_CLIENTS"):
            if not settings.get(name):
                complaints.append(f"published, but {name} is not set: anybody could draw")
        if "Gateway" in kinds and "BackendTLSPolicy" not in kinds:
            complaints.append("the gateway does not know the server's certificate: no BackendTLSPolicy")
    for route in (r for r in resources if r["kind"] == "GRPCRoute"):
        complaints += misrouted("the gateway", lambda path: gateway_forwards(route, path), INSIDE, methods())
    for route in (r for r in resources if r["kind"] == "HTTPRoute"):
        # What is not for strangers ends at Envoy, whose reply the page understands.
        complaints += misrouted("the gateway", lambda call: http_route_forwards(route, call), set(), http_calls())
    complaints += port_complaints(resources)
    for deployment in (r for r in resources if r["kind"] == "Deployment"):
        for name in ("DENOISED_LISTEN", "DENOISED_HTTP_LISTEN"):
            if not settings.get(name, "").startswith("127.0.0.1:"):
                complaints.append(f"the server can be reached without Envoy: {name} is not loopback")
        if not settings.get("DENOISED_CLIENTS") and not settings.get("DENOISED_HTTP_ORIGINS"):
            complaints.append("HTTP clients cannot call the Service by its name: no DENOISED_HTTP_ORIGINS")
        sidecars = deployment["spec"]["template"]["spec"].get("initContainers", [])
        if not any(c["name"] == "envoy" and c.get("restartPolicy") == "Always" for c in sidecars):
            complaints.append("there is no Envoy in front of the server")
        if len(envoys) != 1:
            complaints.append(f"{len(envoys)} configurations of Envoy")
        for envoy in envoys:
            complaints += envoy_complaints(envoy, settings)
    return complaints


def variable(flag):
    return "DENOISED_" + flag[2:].replace("-", "_").upper()


def servers(resources):
    """Each kind of pod with a server: its spec, the container of the server, that of Envoy, and the server's settings."""
    config = {r["metadata"]["name"]: r["data"] for r in resources if r["kind"] == "ConfigMap"}
    for resource in resources:
        if resource["kind"] == "Deployment":
            pod = resource["spec"]["template"]["spec"]
        elif resource["kind"] == "ClusterServingRuntime":
            pod = resource["spec"]
        else:
            continue
        containers = pod.get("initContainers", []) + pod["containers"]
        server = next(c for c in containers if c["name"] in ("denoised", "kserve-container"))
        envoy = next((c for c in containers if c["name"] == "envoy"), None)
        settings = {}
        for source in server.get("envFrom", []):
            settings.update(config[source["configMapRef"]["name"]])
        settings.update({entry["name"]: entry["value"] for entry in server.get("env", [])})
        yield pod, server, envoy, settings


def probe_complaints(server, settings):
    complaints = []
    # Whether it lives, the server itself says: Envoy's limits must not have it killed.
    for name in ("startupProbe", "livenessProbe"):
        asked = server[name].get("httpGet", {})
        if asked.get("port") not in ("metrics", 9090) or asked.get("path") != "/healthz":
            complaints.append(f"the {name} does not ask for /healthz on the metrics port")
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if server[name].get("timeoutSeconds", 1) < 5:
            complaints.append(f"the {name} gives a busy server too little time")
    if settings.get("DENOISED_METRICS_LISTEN") != "[::]:9090":
        complaints.append("the kubelet cannot reach the metrics port, at least not by IPv6")
    return complaints


def drain_complaints(pod, server, envoy, config, settings):
    complaints = []
    hook = "\n".join(envoy.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))
    lame_duck, grace = (float(settings.get(f"DENOISED_{name}_SECONDS", 0)) for name in ("LAME_DUCK", "GRACE"))
    if lame_duck < 5:
        complaints.append("new requests are refused before clients know that the pod leaves")
    needed = lame_duck + grace + DRAIN_END_SECONDS
    left = pod.get("terminationGracePeriodSeconds", 30)
    if needed > left:
        complaints.append(f"a drain takes up to {needed:g} s, and the pod has {left}")
    if envoy in pod["containers"]:  # not a sidecar, which outlives the server anyway
        pause = next((int(line.split()[1]) for line in hook.splitlines() if line.startswith("sleep ")), 0)
        if not needed <= pause < left:
            complaints.append(f"Envoy ends after {pause} s, a drain after up to {needed:g}, and the pod after {left}")
    if "lifecycle" in server:
        complaints.append("a restart of the server alone runs its hooks, too; Envoy's run when the pod ends")
    admin = config.get("admin", {})
    address = next(find(admin, "socket_address"), {})
    if address.get("address") != "127.0.0.1":
        complaints.append("Envoy's admin port is not on loopback")
    paths = [path.get("exact") for path in admin.get("allow_paths", [])]
    if paths != ["/drain_listeners?graceful&skip_exit"]:
        complaints.append(f"Envoy's admin port takes {paths or 'everything'}, not a drain alone")
    elif f"POST {paths[0]} " not in hook or f"/dev/tcp/127.0.0.1/{address.get('port_value')}" not in hook:
        complaints.append("Envoy does not tell clients that the pod leaves: preStop does not ask it to")
    arguments = envoy["args"]
    if ["--drain-strategy", "immediate"] not in [arguments[i : i + 2] for i in range(len(arguments))]:
        complaints.append("Envoy drains some of the connections only")
    if any("=" in argument for argument in arguments):
        complaints.append("Envoy does not start: it does not know --name=value")
    return complaints


def seconds(duration):
    return float(duration.removesuffix("s"))


def idle_complaints(config, settings):
    """Who sends on a connection that the other side is just closing loses the request: the proxy has to close first."""
    text = (ROOT / "server" / "server.cc").read_text(encoding="utf-8")
    of_http = float(re.search(r"idle = std::chrono::seconds\((\d+)\)", text).group(1))
    idle = float(settings.get("DENOISED_MAX_CONNECTION_IDLE_SECONDS", 600)) or float("inf")
    complaints = []
    for cluster in config["static_resources"]["clusters"]:
        server = min(idle, of_http) if cluster["name"] == "http" else idle
        envoy = seconds(next(find(cluster, "idle_timeout"), "3600s"))
        if envoy >= server:
            complaints.append(f"Envoy keeps idle connections to {cluster['name']} for {envoy:g} s, the server for {server:g}")
    return complaints


def memory_complaints(server, settings):
    text = (ROOT / "server" / "config.cc").read_text(encoding="utf-8")
    complaints = [
        f"{flag} is not in MEMORY_BOUNDS of deploy/test/manifests.py"
        for flag in sorted(set(re.findall(r'"(--max-[a-z-]*bytes)"', text)) - set(MEMORY_BOUNDS))
    ]
    unset = [variable(flag) for flag, times in MEMORY_BOUNDS.items() if times and variable(flag) not in settings]
    if unset:
        return complaints + [f"{name} is not set: the defaults are for a whole machine" for name in unset]
    bounds = sum(times * int(settings[variable(flag)]) for flag, times in MEMORY_BOUNDS.items() if times)
    limit = int(server["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    if bounds + MEMORY_ROOM > limit:
        complaints.append(f"the bounds add up to {bounds >> 20} MiB of the {limit >> 20} that the server may have")
    return complaints


def operation(resources):
    """What would fail in a cluster only: complaints about how probes, drains, idle times and memory fit together."""
    complaints = []
    envoys = [yaml.safe_load(r["data"]["envoy.yaml"]) for r in resources if "envoy.yaml" in r.get("data", {})]
    for pod, server, envoy, settings in servers(resources):
        complaints += probe_complaints(server, settings) + memory_complaints(server, settings)
        for config in envoys:
            complaints += drain_complaints(pod, server, envoy, config, settings) + idle_complaints(config, settings)
    scaled = any(r["kind"] in ("HorizontalPodAutoscaler", "ScaledObject") for r in resources)
    for deployment in (r for r in resources if r["kind"] == "Deployment"):
        if scaled and "replicas" in deployment["spec"]:
            complaints.append("each kubectl apply undoes what the autoscaler did: the Deployment names replicas")
    for service in (r for r in resources if r["kind"] == "InferenceService"):
        # KServe refuses it, and its schema does not say so.
        if any("value" not in metric["target"] for metric in find(service, "external")):
            complaints.append("InferenceService: the target of an external metric has no value")
    return complaints


def compose_order(compose):
    """Complaints about the order in which compose stops containers: what depends on another one is stopped first."""
    complaints = []
    services = compose["services"]
    for name, service in services.items():
        after = service.get("depends_on", {})
        if name == "envoy" or name.startswith("denoised"):
            if not after.get("network", {}).get("restart"):
                complaints.append(f"{name} stays in an old network namespace when `network` restarts")
        if not name.startswith("denoised"):
            continue
        if "envoy" not in after:
            complaints.append(f"{name}: Envoy is stopped at the same time, which cuts the calls that the server drains")
        elif after["envoy"].get("restart"):
            complaints.append(f"{name} restarts whenever Envoy does")
    return complaints


def find(value, key):
    """What is under `key`, however deep."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            else:
                yield from find(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find(inner, key)


def without(value, key):
    """A copy without the fields of this name."""
    if isinstance(value, dict):
        return {name: without(inner, key) for name, inner in value.items() if name != key}
    return [without(inner, key) for inner in value] if isinstance(value, list) else value


def checks_self_test(rendered):
    """Fails when an open server, or one that does not work, would not be noticed."""
    gateway, plain, kserve, scaled = (
        rendered[name] for name in ("components/gateway", "overlays/cpu-demo", "overlays/kserve", "components/autoscale/hpa")
    )
    public = [r for r in gateway if r["kind"] in PUBLIC_KINDS]

    def changed(resources, change):
        copied = copy.deepcopy(resources)
        for resource in copied:
            change(resource)
        return copied

    def setting(name, value, new=False):
        def change(resource):
            if resource["kind"] == "ConfigMap" and ("DENOISED_LISTEN" if new else name) in resource["data"]:
                resource["data"][name] = value

        return change

    def envoy(old, new):
        def change(resource):
            if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
                text = resource["data"]["envoy.yaml"]
                assert old in text, old
                resource["data"]["envoy.yaml"] = text.replace(old, new)

        return change

    def field(kind, *path, value=None):
        """Sets a field, or deletes it."""
        def change(resource):
            if resource["kind"] != kind or resource["metadata"]["name"] != "denoised":
                return
            at = resource
            for key in path[:-1]:
                at = at[key]
            if value is None:
                del at[path[-1]]
            else:
                at[path[-1]] = value

        return change

    def no_sidecar(resource):
        if resource["kind"] == "Deployment":
            del resource["spec"]["template"]["spec"]["initContainers"]

    def routes_the_service(resource):
        if resource["kind"] == "GRPCRoute":
            del resource["spec"]["rules"][-1]["matches"][-1]["method"]["method"]

    def http_without_tls(resource):
        if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
            config = yaml.safe_load(resource["data"]["envoy.yaml"])
            del config["static_resources"]["listeners"][1]["filter_chains"][0]["transport_socket"]
            resource["data"]["envoy.yaml"] = yaml.safe_dump(config)

    def load_balancer(resource):
        if resource["kind"] == "Service":
            resource["spec"]["type"] = "LoadBalancer"

    for what, resources in [
        ("a gateway without clients", plain + public),
        ("a gateway without BackendTLSPolicy", [r for r in gateway if r["kind"] != "BackendTLSPolicy"]),
        ("a load balancer without clients", changed(plain, load_balancer)),
        ("a server that listens everywhere", changed(plain, setting("DENOISED_LISTEN", "0.0.0.0:50051"))),
        ("HTTP that listens everywhere", changed(plain, setting("DENOISED_HTTP_LISTEN", "0.0.0.0:8081"))),
        ("HTTP on a port that Envoy does not know", changed(plain, setting("DENOISED_HTTP_LISTEN", "127.0.0.1:8080"))),
        ("HTTP clients without a name", changed(plain, setting("DENOISED_HTTP_ORIGINS", ""))),
        ("a server without Envoy", changed(plain, no_sidecar)),
        ("a route for ModelAdmin", changed(plain, envoy("/denoised.v1.ImageGeneration/", "/"))),
        (
            "a route for RepositoryModelLoad",
            changed(plain, envoy("path: /inference.GRPCInferenceService/ModelInfer", "prefix: /inference.GRPCInferenceService/")),
        ),
        ("a GRPCRoute for RepositoryModelLoad", changed(gateway, routes_the_service)),
        ("no route for ModelInfer", changed(plain, envoy("GRPCInferenceService/ModelInfer", "GRPCInferenceService/None"))),
        ("a route for POST /v1/models", changed(plain, envoy("GET|HEAD|OPTIONS", ".*"))),
        ("a route for aliases", changed(plain, envoy("path: /v1/server", "prefix: /v1/"))),
        ("a route for metrics", changed(plain, envoy("path: /healthz", "path: /metrics"))),
        ("no route for edits", changed(plain, envoy("/v1/images/edits", "/v1/images/edit"))),
        ("no route for events", changed(plain, envoy("events|cancel", "cancel"))),
        ("no route for the page's scripts", changed(plain, envoy("html|css|js|", "html|css|"))),
        ("streams that end after 15 s", changed(plain, envoy("{cluster: http, timeout: 0s}", "{cluster: http}"))),
        ("no bound for headers", changed(plain, envoy("max_request_headers_kb: 16", "proxy_100_continue: true"))),
        ("HTTP to the port of gRPC", changed(plain, envoy("port_value: 8081", "port_value: 50052"))),
        ("HTTP without TLS", changed(gateway, http_without_tls)),
        ("a Service without HTTP", changed(plain, field("Service", "spec", "ports", 1))),
        ("a NetworkPolicy without HTTP", changed(plain, field("NetworkPolicy", "spec", "ingress", 0, "ports", 1))),
        ("a NetworkPolicy with all ports", changed(plain, field("NetworkPolicy", "spec", "ingress", 0, "ports", 1, "port", value=8081))),
        ("an HTTPRoute to gRPC", changed(gateway, field("HTTPRoute", "spec", "rules", 0, "backendRefs", 0, "port", value=50051))),
        ("an HTTPRoute of both listeners", changed(gateway, field("HTTPRoute", "spec", "parentRefs", 0, "sectionName"))),
        (
            "an HTTPRoute of a part",
            changed(gateway, field("HTTPRoute", "spec", "rules", 0, "matches", value=[{"path": {"value": "/v1"}}])),
        ),
        ("HTTP that the gateway does not check", changed(gateway, field("BackendTLSPolicy", "spec", "targetRefs", 1))),
        (
            "two listeners of a name",
            changed(gateway, field("Gateway", "spec", "listeners", 1, "hostname", value="denoised.example.com")),
        ),
    ]:
        noticed(what, exposure(resources))

    def average(resource):
        if resource["kind"] == "InferenceService":
            (metric,) = find(resource, "external")
            metric["target"] = {"type": "AverageValue", "averageValue": "2"}

    container = ("spec", "template", "spec", "containers", 0)
    sidecar = ("spec", "template", "spec", "initContainers", 0)
    runtime = ("ClusterServingRuntime", "spec", "containers")
    grpc_probe = {"grpc": {"port": 50051, "service": "liveness"}, "timeoutSeconds": 5}
    for what, resources in [
        ("liveness through Envoy", changed(plain, field("Deployment", *container, "livenessProbe", value=grpc_probe))),
        ("liveness through KServe's Envoy", changed(kserve, field(*runtime, 0, "livenessProbe", value=grpc_probe))),
        ("a probe of a second", changed(plain, field("Deployment", *container, "readinessProbe", "timeoutSeconds"))),
        ("metrics on loopback", changed(plain, setting("DENOISED_METRICS_LISTEN", "127.0.0.1:9090"))),
        ("no lame duck", changed(plain, setting("DENOISED_LAME_DUCK_SECONDS", "0"))),
        ("a drain that the kubelet cuts off", changed(plain, setting("DENOISED_GRACE_SECONDS", "115"))),
        ("a short time to end", changed(plain, field("Deployment", "spec", "template", "spec", "terminationGracePeriodSeconds"))),
        ("KServe's Envoy ends first", changed(kserve, field(*runtime, 1, "lifecycle", "preStop", "exec", "command", 2, value="sleep 20"))),
        ("no preStop hook", changed(plain, field("Deployment", *sidecar, "lifecycle"))),
        ("a hook of the server", changed(plain, field("Deployment", *container, "lifecycle", value={"preStop": {"sleep": {"seconds": 5}}}))),
        ("a hook of another port", changed(plain, envoy("port_value: 9901", "port_value: 9902"))),
        ("an open admin port", changed(plain, envoy("{address: 127.0.0.1, port_value: 9901}", '{address: "::", port_value: 9901}'))),
        ("an admin port that takes all", changed(plain, envoy("allow_paths", "ignored"))),
        ("a drain by chance", changed(plain, field("Deployment", *sidecar, "args", -1, value="gradual"))),
        ("an Envoy that does not start", changed(plain, field("Deployment", *sidecar, "args", 0, value="--config-path=/etc"))),
        ("idle HTTP", changed(plain, envoy("idle_timeout: 60s", "idle_timeout: 75s"))),
        ("idle gRPC", changed(plain, envoy("idle_timeout: 300s", "idle_timeout: 600s"))),
        ("a server that soon closes", changed(plain, setting("DENOISED_MAX_CONNECTION_IDLE_SECONDS", "60", new=True))),
        ("a bound too many", changed(plain, setting("DENOISED_MAX_QUEUED_BYTES", str(1 << 30)))),
        ("a limit too low", changed(kserve, field(*runtime, 0, "resources", "limits", "memory", value="3Gi"))),
        ("a bound by default", changed(kserve, field(*runtime, 0, "env", -1))),
        ("a target without a value", changed(kserve, average)),
        ("an autoscaler that is undone", changed(scaled, field("Deployment", "spec", "replicas", value=2))),
    ]:
        noticed(what, operation(resources))


    compose = read_compose()
    for what, service, path, value in [
        ("a server that is stopped with Envoy", "denoised", ("envoy",), None),
        ("a server on a GPU that is stopped with Envoy", "denoised-gpu", ("envoy",), None),
        ("a server that restarts with Envoy", "denoised", ("envoy", "restart"), True),
        ("an Envoy that loses its network", "envoy", ("network", "restart"), None),
    ]:
        wrong = copy.deepcopy(compose)
        *parents, last = path
        inner = wrong["services"][service]["depends_on"]
        for parent in parents:
            inner = inner[parent]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
        noticed(what, compose_order(wrong))


def read_compose():
    return yaml.safe_load((ROOT / "deploy/compose.yaml").read_text(encoding="utf-8"))


def noticed(what, complaints):
    if not complaints:
        raise SystemExit(f"{what} was not noticed")
    print(f"caught: {what}: {complaints[0]}")


def self_test(validator, resources):
    """Fails when a planted error is not caught."""
    container = ("spec", "template", "spec", "containers", 0)
    for kind, path, value in [
        ("Deployment", (*container, "readynessProbe"), {}),
        ("Deployment", ("spec", "replicas"), "two"),
        ("Deployment", (*container, "securityContext", "readOnlyRoot"), True),
        ("Service", ("spec", "ports", 0, "port"), "grpc"),
        ("NetworkPolicy", ("spec", "policyType"), ["Ingress"]),
        ("ServiceMonitor", ("spec", "endpoints", 0, "intervall"), "15s"),
        ("GRPCRoute", ("spec", "rules", 0, "backends"), []),
        ("HTTPRoute", ("spec", "rules", 0, "timeout"), "0s"),
        ("HTTPRoute", ("spec", "rules", 0, "timeouts", "stream"), "0s"),
        ("BackendTLSPolicy", ("spec", "validation", "hostnames"), ["denoised"]),
        ("Job", ("spec", "backOffLimit"), 3),
        ("ScaledObject", ("spec", "minReplicas"), 2),
        ("ClusterServingRuntime", ("spec", "protocolVersion"), []),
        ("InferenceService", ("spec", "predictor", "model", "storageURI"), "pvc://x"),
        ("TrainingRuntime", ("spec", "mlPolicy", "torch", "numProcs"), 1),
        ("TrainJob", ("spec", "trainer", "numProcPerNode"), "auto"),
        ("TrainJob", ("spec", "trainer", "nodes"), 2),
    ]:
        found = validator.complaint(plant(resources, kind, path, value))
        if found == "unknown":
            continue
        if found is None:
            raise SystemExit(f"a planted {kind} {'.'.join(map(str, path))} was not caught")
        print(f"caught: {kind} {found.splitlines()[0][:120]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubernetes", default="1.31")
    parser.add_argument("--crds", help="directory of CustomResourceDefinitions")
    flags = parser.parse_args()
    if not shutil.which("kubectl"):
        print("rendered by deploy/test/kustomize.py alone: there is no kubectl")
    if not kubernetes_validate:
        print("manifests are not validated: there is no kubernetes-validate")
    validator = Validator(flags.kubernetes, read_crds(flags.crds) if flags.crds else {})

    rendered = {}
    for file in sorted((K8S / "overlays").rglob("kustomization.yaml")):
        rendered[file.parent.relative_to(K8S).as_posix()] = render(file.parent)
    # Beside a copy, as kustomize takes no absolute paths.
    with tempfile.TemporaryDirectory() as copied:
        shutil.copytree(ROOT / "deploy", copied, dirs_exist_ok=True)
        for component in ("tls", "gateway", "autoscale/hpa", "autoscale/keda"):
            directory = pathlib.Path(copied, "k8s", f"with-{component.replace('/', '-')}")
            directory.mkdir()
            text = WITH_COMPONENT.format(name=component)
            (directory / "kustomization.yaml").write_text(text, encoding="utf-8")
            rendered[f"components/{component}"] = render(directory)

    complaints = [
        f"{name}: {complaint}"
        for name, resources in rendered.items() for complaint in exposure(resources) + operation(resources)
    ] + [f"compose.yaml: {complaint}" for complaint in compose_order(read_compose())]
    if complaints:
        raise SystemExit("\n".join(complaints))
    self_test(validator, [resource for all_of in rendered.values() for resource in all_of])
    checks_self_test(rendered)
    wrong = 0
    for name, resources in rendered.items():
        unknown = []
        for resource in resources:
            found = validator.complaint(resource)
            if found == "unknown":
                unknown.append(resource["kind"])
            elif found:
                wrong += 1
                print(f"{name}: {resource['kind']} {resource['metadata']['name']}: {found}")
        note = f", not validated, as there is no schema: {', '.join(unknown)}" if unknown and kubernetes_validate else ""
        print(f"{name}: {len(resources)} resources{note}")

    # Without a selector they would be about every pod of the namespace.
    for kind, field in [("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")]:
        for name, resources in rendered.items():
            for resource in (r for r in resources if r["kind"] == kind):
                labels = resource["spec"].get(field, {}).get("matchLabels", {})
                of = "denoise-train" if name == "overlays/train" else "denoised"
                if labels.get("app.kubernetes.io/name") != of:
                    wrong += 1
                    print(f"{name}: {kind} selects {labels}, not the pods of {of}")

    spec = next(r for r in rendered["overlays/monitoring"] if r["kind"] == "PrometheusRule")["spec"]
    if spec != yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8")):
        wrong += 1
        print("overlays/monitoring/prometheusrule.yaml differs from deploy/prometheus/rules.yml")
    envoys = [
        yaml.safe_load((ROOT / "deploy" / path).read_text(encoding="utf-8"))
        for path in ("envoy/envoy.yaml", "k8s/components/tls/envoy.yaml")
    ]
    if envoys[0] != without(envoys[1], "transport_socket"):
        wrong += 1
        print("components/tls/envoy.yaml differs from deploy/envoy/envoy.yaml in more than TLS")
    print(f"{wrong} errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
