#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renders every overlay and component of deploy/k8s with kubectl kustomize and validates the result
strictly: an unknown field is an error. Checks also that no server is published without TLS and tokens
or reachable without Envoy. Shows first that it catches planted errors. Needs kubectl and
`pip install kubernetes-validate`.

    deploy/test/manifests.py [--kubernetes 1.31] [--crds DIRECTORY]

Custom resources are validated against the CustomResourceDefinitions in DIRECTORY, YAML files as
their projects publish them (or `kubectl get crds -o yaml`). Without it they are only rendered.
"""

import argparse
import copy
import pathlib
import re
import subprocess
import sys
import tempfile

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
K8S = ROOT / "deploy" / "k8s"

# A component as an overlay would use it.
WITH_COMPONENT = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../overlays/cpu-demo]
components: [../components/{name}]
"""

# What is for operators: it changes the models, or tells what there is to call. Every other method of
# the protos is for clients.
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
# What gives a server an address outside the cluster.
PUBLIC_KINDS = {"Gateway", "GRPCRoute", "HTTPRoute", "TLSRoute", "TCPRoute", "Ingress"}


def render(directory):
    """The resources that kubectl would apply."""
    result = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"{directory}: {result.stderr.strip()}")
    return [document for document in yaml.safe_load_all(result.stdout) if document]


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


def envoy_forwards(routes, path):
    """Whether the first route that matches forwards. A matcher unknown here matches everything."""
    for entry in routes:
        match = entry["match"]
        matches = match["path"] == path if "path" in match else path.startswith(match.get("prefix", ""))
        if matches:
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


def misrouted(who, forwards):
    """Complaints about methods that get through and should not, or should and do not."""
    return [f"{who} forwards {path}, which is not for strangers" for path in sorted(INSIDE) if forwards(path)] + [
        f"{who} does not forward {path}" for path in sorted(methods() - INSIDE) if not forwards(path)
    ]


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
        complaints += misrouted("the gateway", lambda path: gateway_forwards(route, path))
    for deployment in (r for r in resources if r["kind"] == "Deployment"):
        if not settings.get("DENOISED_LISTEN", "").startswith("127.0.0.1:"):
            complaints.append("the server can be reached without Envoy: DENOISED_LISTEN is not loopback")
        sidecars = deployment["spec"]["template"]["spec"].get("initContainers", [])
        if not any(c["name"] == "envoy" and c.get("restartPolicy") == "Always" for c in sidecars):
            complaints.append("there is no Envoy in front of the server")
        if len(envoys) != 1:
            complaints.append(f"{len(envoys)} configurations of Envoy")
        for envoy in envoys:
            for routes in find(envoy, "routes"):
                complaints += misrouted("Envoy", lambda path: envoy_forwards(routes, path))
            encrypted = len(list(find(envoy, "transport_socket"))) == 2
            if encrypted != bool(settings.get("DENOISED_TLS_CERT")):
                complaints.append("Envoy and the server disagree on TLS")
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


def exposure_self_test(rendered):
    """Fails when an open server would not be noticed."""
    gateway, plain = rendered["components/gateway"], rendered["overlays/cpu-demo"]
    public = [r for r in gateway if r["kind"] in PUBLIC_KINDS]

    def changed(resources, change):
        copied = copy.deepcopy(resources)
        for resource in copied:
            change(resource)
        return copied

    def listens_everywhere(resource):
        if resource["kind"] == "ConfigMap" and "DENOISED_LISTEN" in resource["data"]:
            resource["data"]["DENOISED_LISTEN"] = "0.0.0.0:50051"

    def no_sidecar(resource):
        if resource["kind"] == "Deployment":
            del resource["spec"]["template"]["spec"]["initContainers"]

    def forwards_everything(resource):
        if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
            text = resource["data"]["envoy.yaml"].replace("/denoised.v1.ImageGeneration/", "/")
            resource["data"]["envoy.yaml"] = text

    def forwards_the_service(resource):
        if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
            text = resource["data"]["envoy.yaml"].replace(
                "path: /inference.GRPCInferenceService/ModelInfer", "prefix: /inference.GRPCInferenceService/"
            )
            resource["data"]["envoy.yaml"] = text

    def forgets_a_method(resource):
        if resource["kind"] == "ConfigMap" and "envoy.yaml" in resource["data"]:
            text = resource["data"]["envoy.yaml"].replace("GRPCInferenceService/ModelInfer", "GRPCInferenceService/None")
            resource["data"]["envoy.yaml"] = text

    def routes_the_service(resource):
        if resource["kind"] == "GRPCRoute":
            del resource["spec"]["rules"][-1]["matches"][-1]["method"]["method"]

    def load_balancer(resource):
        if resource["kind"] == "Service":
            resource["spec"]["type"] = "LoadBalancer"

    for what, resources in [
        ("a gateway without clients", plain + public),
        ("a gateway without BackendTLSPolicy", [r for r in gateway if r["kind"] != "BackendTLSPolicy"]),
        ("a load balancer without clients", changed(plain, load_balancer)),
        ("a server that listens everywhere", changed(plain, listens_everywhere)),
        ("a server without Envoy", changed(plain, no_sidecar)),
        ("a route for ModelAdmin", changed(plain, forwards_everything)),
        ("a route for RepositoryModelLoad", changed(plain, forwards_the_service)),
        ("a GRPCRoute for RepositoryModelLoad", changed(gateway, routes_the_service)),
        ("no route for ModelInfer", changed(plain, forgets_a_method)),
    ]:
        found = exposure(resources)
        if not found:
            raise SystemExit(f"{what} was not noticed")
        print(f"caught: {what}: {found[0]}")


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
        ("BackendTLSPolicy", ("spec", "validation", "hostnames"), ["denoised"]),
        ("Job", ("spec", "backOffLimit"), 3),
        ("ScaledObject", ("spec", "minReplicas"), 2),
        ("ClusterServingRuntime", ("spec", "protocolVersion"), []),
        ("InferenceService", ("spec", "predictor", "model", "storageURI"), "pvc://x"),
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
    validator = Validator(flags.kubernetes, read_crds(flags.crds) if flags.crds else {})

    rendered = {}
    for file in sorted((K8S / "overlays").rglob("kustomization.yaml")):
        rendered[file.parent.relative_to(K8S).as_posix()] = render(file.parent)
    for component in ("tls", "gateway"):
        # In the repository, as kustomize takes no absolute paths.
        with tempfile.TemporaryDirectory(dir=K8S) as directory:
            file = pathlib.Path(directory) / "kustomization.yaml"
            file.write_text(WITH_COMPONENT.format(name=component), encoding="utf-8")
            rendered[f"components/{component}"] = render(directory)

    self_test(validator, [resource for all_of in rendered.values() for resource in all_of])
    exposure_self_test(rendered)
    wrong = 0
    for name, resources in rendered.items():
        for complaint in exposure(resources):
            wrong += 1
            print(f"{name}: {complaint}")
        unknown = []
        for resource in resources:
            found = validator.complaint(resource)
            if found == "unknown":
                unknown.append(resource["kind"])
            elif found:
                wrong += 1
                print(f"{name}: {resource['kind']} {resource['metadata']['name']}: {found}")
        note = f", not validated for want of a schema: {', '.join(unknown)}" if unknown else ""
        print(f"{name}: {len(resources)} resources{note}")

    # Without a selector they would be about every pod of the namespace.
    for kind, field in [("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")]:
        for name, resources in rendered.items():
            for resource in (r for r in resources if r["kind"] == kind):
                labels = resource["spec"].get(field, {}).get("matchLabels", {})
                if labels.get("app.kubernetes.io/name") != "denoised":
                    wrong += 1
                    print(f"{name}: {kind} selects {labels}, not the pods of denoised")

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
