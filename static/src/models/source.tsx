// What a pasted text is: its description and variants with where they fit, or the candidates of a bare name.
import { useId, useState, type ReactNode, type SubmitEvent } from "react";
import { bytes, count } from "../lib/format";
import { Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Checkbox, TextField } from "../ui/text-field";
import { contextWords } from "./memory";
import type { Source, SourceVariant } from "./shapes";

const KINDS: Readonly<Record<Source["kind"], string>> = {
  huggingface: "Hugging Face", gallery: "Gallery", ollama: "Ollama", oci: "OCI artifact", https: "Web address", s3: "S3", folder: "Folder on a share", definition: "Definition", search: "Search",
};

export interface Chosen {
  variant: string;
  name: string;
  load: boolean;
}

/** Only these lead out of the page. */
const OUTSIDE = /^https?:\/\//i;

export function SourceView({ source, busy, onAdd }: { source: Source; busy: boolean; onAdd: (chosen: Chosen) => void }): ReactNode {
  const { kind, title, problem, variants } = source;
  const first = variants.find(({ recommended }) => recommended) ?? variants[0];
  const [variant, setVariant] = useState(first?.id ?? "");
  const [name, setName] = useState(source.name);
  const [load, setLoad] = useState(true);
  const chosen = variants.find(({ id }) => id === variant);
  const refusal = refusalOf(source, name);
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (!busy && refusal === "") onAdd({ variant, name: name.trim() === source.name ? "" : name.trim(), load });
  };
  const size = chosen?.size ?? 0;
  return (
    <Panel title={title || source.name} aside={<span className="tag">{KINDS[kind]}</span>}>
      <Facts source={source} />
      {problem !== "" && (
        <p className={variants.length === 0 ? "problem" : "risk"} role="alert">
          <bdi>{problem}</bdi>
        </p>
      )}
      <form className="stack" noValidate onSubmit={submit}>
        {variants.length > 0 && <Variants variants={variants} chosen={variant} onChoose={setVariant} />}
        <div className="row wrap add-name">
          <TextField label="Name of the model" value={name} problem={name.trim() === "" ? "Enter a name." : ""} onChange={setName} />
          <Checkbox label="Load it afterwards" on={load} onChange={setLoad} />
        </div>
        <div>
          <Button type="submit" kind="primary" busy={busy} refusal={refusal}>
            {addWords(kind, size)}
            {load && " and load"}
          </Button>
        </div>
      </form>
    </Panel>
  );
}

function Facts({ source: { description, licence, gated, urls, commit } }: { source: Source }): ReactNode {
  return (
    <>
      {description !== "" && (
        <p className="source-description anywhere">
          <bdi>{description}</bdi>
        </p>
      )}
      <p className="row wrap muted">
        {licence !== "" && (
          <span>
            Licence <bdi>{licence}</bdi>
          </span>
        )}
        {gated && <span className="pill warn">needs an accepted licence</span>}
        {commit !== "" && <span className="mono">{commit.slice(0, 12)}</span>}
        {urls.filter((url) => OUTSIDE.test(url)).slice(0, 3).map((url) => (
          <a key={url} href={url} target="_blank" rel="noopener noreferrer nofollow" className="name">
            {url}
          </a>
        ))}
      </p>
    </>
  );
}

function addWords(kind: Source["kind"], size: number): string {
  if (size > 0) return `Download ${bytes(size)}`;
  return kind === "definition" ? "Create" : "Add";
}

/** What stands in the way of an import; "" if nothing does. */
function refusalOf({ variants, problem }: Source, name: string): string {
  if (variants.length === 0) return problem || "The source has nothing that can run";
  return name.trim() === "" ? "Enter a name first" : "";
}

const FIRST = 12;

function Variants({ variants, chosen, onChoose }: { variants: readonly SourceVariant[]; chosen: string; onChoose: (id: string) => void }): ReactNode {
  const [isExpanded, setIsExpanded] = useState(false);
  const group = useId();
  const shown = isExpanded ? variants : variants.filter(({ id }, index) => index < FIRST || id === chosen);
  return (
    <fieldset className="variants">
      <legend>{count(variants.length, "variant")}</legend>
      {shown.map((variant) => (
        <label key={variant.id} className="variant" data-chosen={variant.id === chosen || undefined}>
          <input type="radio" name={group} checked={variant.id === chosen} onChange={() => onChoose(variant.id)} />
          <span className="variant-name anywhere">
            <strong>
              <bdi>{variant.label}</bdi>
            </strong>{" "}
            {variant.recommended && <span className="tag">recommended</span>} {variant.gated && <span className="tag">gated</span>}
          </span>
          <span>{variant.size > 0 ? bytes(variant.size) : "size unknown"}</span>
          <span className="muted">{variant.context_size > 0 && `${contextWords(variant.context_size)} context`}</span>
          <Fit variant={variant} />
        </label>
      ))}
      {shown.length < variants.length && (
        <div>
          <Button small onClick={() => setIsExpanded(true)}>
            Show {variants.length - shown.length} more
          </Button>
        </div>
      )}
    </fieldset>
  );
}

/** Where it fits, node by node on hover. */
function Fit({ variant: { fit } }: { variant: SourceVariant }): ReactNode {
  const details = fit.nodes.map(({ node_name: node, fits, reason }) => reason || `${node}: ${fits ? "fits" : "does not fit"}`).join("\n");
  return (
    <span className={`variant-fit ${fit.fits === null ? "" : fit.fits ? "good" : "bad"}`} title={details}>
      <bdi>{fit.summary}</bdi>
    </span>
  );
}

export function Candidates({ source: { candidates, problem }, onChoose }: { source: Source; onChoose: (text: string) => void }): ReactNode {
  return (
    <Panel title="Models with this name">
      {problem !== "" && (
        <p className="problem" role="alert">
          <bdi>{problem}</bdi>
        </p>
      )}
      {candidates.length === 0 && problem === "" && <p>None. Paste an address, or search the catalogue below.</p>}
      <ul className="candidates">
        {candidates.map(({ text, title, kind, description, size }) => (
          <li key={text}>
            <Button aria-label={`Choose ${title || text}`} onClick={() => onChoose(text)}>
              Choose
            </Button>
            <span className="grow anywhere">
              <strong>
                <bdi>{title || text}</bdi>
              </strong>{" "}
              <span className="tag">{(KINDS as Readonly<Record<string, string>>)[kind] ?? kind}</span> {size > 0 && bytes(size)}
              <span className="muted candidate-text">
                <bdi>{description}</bdi>
              </span>
            </span>
          </li>
        ))}
      </ul>
    </Panel>
  );
}
