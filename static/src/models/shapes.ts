// The shapes of definitions and sources on the wire.
import type { components } from "../api/schema";

type ModelFit = components["schemas"]["ModelFit"];

export interface DefinitionRow {
  name: string;
  backend: string;
  model: string;
  origin: "file" | "gallery" | "import" | "api" | "editor";
  state: "active" | "disabled" | "shadowed" | "unusable";
  revision: number;
  /** Bytes of the files that are there; 0 if none are. */
  size: number;
  context_size: number | null;
  use_cases: string[];
  updated_at: string;
  actor: string;
  problem: string;
}

export interface UnusableFile {
  file: string;
  name: string;
  /** From 1; 0 if not known. */
  line: number;
  column: number;
  error: string;
}

export interface DefinitionList {
  definitions: DefinitionRow[];
  total: number;
  page: number;
  items: number;
  unusable: UnusableFile[];
}

/** The fields that most people change. */
export interface DefinitionForm {
  context_size: number | null;
  parallel: number | null;
  gpu_layers: number | "auto" | null;
  template: string;
  options: string[];
  max_tokens: number | null;
}

export interface DefinitionDetail {
  name: string;
  text: string;
  origin: DefinitionRow["origin"];
  state: DefinitionRow["state"];
  shadowed: boolean;
  file: string;
  revision: number;
  /** Null if the text cannot be used. */
  form: DefinitionForm | null;
  size: number;
  files: { path: string; size: number; present: boolean }[];
  updated_at: string;
  actor: string;
  warnings: string[];
  error: string;
}

export interface TextError {
  line: number;
  column: number;
  path: string;
  message: string;
}

export interface DefinitionPreview {
  valid: boolean;
  errors: TextError[];
  warnings: string[];
  text: string;
  form: DefinitionForm | null;
  revision_changes: boolean;
  replicas: { node_id: string; node_name: string; replica_index: number }[];
  fit: ModelFit | null;
  diff: string;
}

export interface Revision {
  number: number;
  actor: string;
  at: string;
  reason: string;
  origin: string;
  diff: string;
}

export interface SourceVariant {
  id: string;
  label: string;
  quantization: string;
  /** 0 if not known. */
  size: number;
  files: { path: string; size: number }[];
  licence: string;
  gated: boolean;
  recommended: boolean;
  /** 0 if not known. */
  context_size: number;
  fit: { fits: boolean | null; summary: string; nodes: { node_id: string; node_name: string; fits: boolean; reason: string }[] };
}

export interface SourceCandidate {
  text: string;
  title: string;
  kind: string;
  description: string;
  size: number;
}

export interface Source {
  kind: "huggingface" | "gallery" | "ollama" | "oci" | "https" | "s3" | "folder" | "definition" | "search";
  title: string;
  description: string;
  licence: string;
  gated: boolean;
  urls: string[];
  icon: string;
  commit: string;
  name: string;
  task: string;
  variants: SourceVariant[];
  candidates: SourceCandidate[];
  problem: string;
}

export interface CatalogueModel {
  id: string;
  name: string;
  gallery: string;
  description: string;
  icon: string;
  licence: string;
  tags: string[];
  task: string;
  size: number;
  installed: boolean;
  jobID: string;
  fits: boolean | null;
}

export interface Catalogue {
  models: CatalogueModel[];
  total: number;
  page: number;
  items: number;
  tasks: string[];
  licences: string[];
  galleries: string[];
  gallery_errors: { name: string; error: string }[];
}

export interface Started {
  jobID: string;
  statusUrl: string;
  message: string;
  deduplicated?: boolean;
}

export interface ModelRate {
  name: string;
  requests_per_second: number;
}
