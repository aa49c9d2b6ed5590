// SPDX-License-Identifier: Apache-2.0
// The same request in the words of other clients. Files and tokens are named, never copied.

const quote = (text) => /^[A-Za-z0-9_./:=@,-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
const python = (text) => JSON.stringify(text);
const short = (name, prefix) => name.replace(prefix, "").toLowerCase();

/** What the request is without what only this page needs. */
function core(params) {
  const {request_id: _, disconnect_policy: __, priority: ___, ...rest} = params;
  const copy = structuredClone(rest);
  if (copy.init_image) copy.init_image.encoded = "@BASE64";
  if (copy.mask) copy.mask.encoded = "@BASE64";
  return copy;
}

const extensionOf = ({output}) => output ? short(output.format, "IMAGE_FORMAT_").replace("jpeg", "jpg") : "png";
const grpcAddress = () => `${location.hostname}:50051`;

/** `command` sends the request: `stdin` is how it names its standard input as the data. */
function sending(params, command, stdin) {
  const text = quote(JSON.stringify({params: core(params)}));
  if (!params.init_image) return `${command} -d ${text}`;
  // Single quotes end around each file, so that the shell fills it in. Linux allows 128 KiB in one argument of a
  // program; printf is part of the shell and has no limit.
  const body = ["start.png", "mask.png"].reduce(
    (rest, file) => rest.replace(`"@BASE64"`, `"'"$(base64 -w0 ${file})"'"`), text);
  return `printf %s ${body} \\\n  | ${command} -d ${stdin}`;
}

/** Saves what a reply in JSON holds: one picture, or each under its seed. */
function saving(params) {
  const extension = extensionOf(params);
  if (!(params.count > 1)) return `jq -r '.images[0].encoded' | base64 -d > picture.${extension}`;
  return `jq -r '.images[] | "\\(.seed) \\(.encoded)"' \\\n` +
    `  | while read -r seed data; do printf %s "$data" | base64 -d > "$seed.${extension}"; done`;
}

export function asCurl(params, withToken) {
  const header = withToken ? ` -H "Authorization: Bearer $TOKEN"` : "";
  const command = `curl -s ${location.origin}/v1/generate${header} -H 'Content-Type: application/json'`;
  return `${sending(params, command, "@-")} \\\n  | ${saving(params)}`;
}

export function asGrpcurl(params, withToken) {
  const secure = location.protocol === "https:" ? "" : " -plaintext";
  const header = withToken ? ` -H "Authorization: Bearer $TOKEN"` : "";
  return `${sending(params, `grpcurl${secure}${header}`, "@")} \\\n` +
    `  ${grpcAddress()} denoised.v1.ImageGeneration/Generate \\\n  | ${saving(params)}`;
}

export function asDenoise(params, withToken) {
  const words = ["denoise", "generate"];
  const add = (flag, value) => {
    if (value === undefined) return;
    if (String(value).startsWith("-")) words.push(`${flag}=${quote(String(value))}`);  // it is no flag
    else words.push(flag, quote(String(value)));
  };
  const conditions = params.conditions || [], [first = {}] = conditions;
  const last = first.text?.startsWith("-") ? ["--", quote(first.text)] : [];
  if (first.text !== undefined && !last.length) words.push(quote(first.text));
  add("-m", params.model);
  add("--prompt-2", first.text_2);
  add("--negative", first.negative_text);
  add("--negative-2", first.negative_text_2);
  add("--clip-skip", params.text_options?.clip_skip);
  if (first.class_label !== undefined) add("-l", conditions.map((each) => each.class_label).join(","));
  if (first.class_vector?.length) add("--class-vectors", conditions.flatMap((each) => each.class_vector).join(","));
  if (params.count > 1) add("-n", params.count);
  add("--seed", params.seed);
  add("--steps", params.steps);
  add("--guidance", params.guidance_scale);
  add("--image-guidance", params.image_guidance_scale);
  add("--guidance-rescale", params.guidance_rescale);
  add("--guidance-start", params.guidance_start);
  add("--guidance-stop", params.guidance_stop);
  if (params.sampler) add("--sampler", short(params.sampler, "SAMPLER_"));
  if (params.noise_schedule) add("--schedule", short(params.noise_schedule, "NOISE_SCHEDULE_"));
  add("--eta", params.eta);
  add("--churn", params.s_churn);
  add("--order", params.solver_order);
  if (params.width) add("--size", `${params.width}x${params.height}`);
  if (params.init_image) {
    add("--init-image", "start.png");
    add("--strength", params.init_image.strength);
  }
  if (params.mask) add("--mask", "mask.png");
  if (params.output) add("--format", short(params.output.format, "IMAGE_FORMAT_"));
  add("--server", grpcAddress());  // or a context's server would be asked
  if (location.protocol === "https:") words.push("--tls");
  if (withToken) add("--token-file", "TOKEN_FILE");
  return [...words, ...last].join(" ");
}

export function asPython(params, withToken) {
  const words = [];
  const add = (name, value) => value !== undefined && words.push(`${name}=${value}`);
  const conditions = params.conditions || [], [first = {}] = conditions;
  if (first.text !== undefined) words.push(python(first.text));
  add("prompt_2", first.text_2 && python(first.text_2));
  add("negative_prompt", first.negative_text === undefined ? undefined : python(first.negative_text));
  add("negative_prompt_2", first.negative_text_2 && python(first.negative_text_2));
  add("clip_skip", params.text_options?.clip_skip);
  if (first.class_label !== undefined) add("labels", `[${conditions.map((each) => each.class_label).join(", ")}]`);
  if (first.class_vector?.length) {
    add("class_vectors", `[${conditions.flatMap((each) => each.class_vector).join(", ")}]`);
  }
  add("model", params.model && python(params.model));
  if (params.count > 1) add("count", params.count);
  add("seed", params.seed);
  add("steps", params.steps);
  for (const name of ["guidance_scale", "image_guidance_scale", "guidance_rescale", "guidance_start",
    "guidance_stop"]) add(name, params[name]);
  if (params.sampler) add("sampler", python(short(params.sampler, "SAMPLER_")));
  if (params.noise_schedule) add("noise_schedule", python(short(params.noise_schedule, "NOISE_SCHEDULE_")));
  add("eta", params.eta);
  add("s_churn", params.s_churn);
  add("solver_order", params.solver_order);
  if (params.width) add("size", `(${params.width}, ${params.height})`);
  if (params.init_image) {
    add("init_image", `"start.png"`);
    add("strength", params.init_image.strength);
  }
  if (params.mask) add("mask", `"mask.png"`);
  if (params.output) add("format", python(short(params.output.format, "IMAGE_FORMAT_")));
  const options = [python(grpcAddress())];
  if (location.protocol === "https:") options.push("tls=denoised.TLS()");
  if (withToken) options.push(`token_file="TOKEN_FILE"`);
  return `import denoised\n\nwith denoised.Client(${options.join(", ")}) as client:\n` +
    `    for image in client.generate(${words.join(", ")}):\n` +
    `        image.save(f"{image.seed}.${extensionOf(params)}")`;
}

export const forms = {curl: asCurl, grpcurl: asGrpcurl, denoise: asDenoise, Python: asPython};
