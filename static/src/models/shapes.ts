// The shapes of definitions and sources on the wire.
import type { components } from "../api/schema";

type Schemas = components["schemas"];
export type DefinitionRow = Schemas["DefinitionSummary"];
export type UnusableFile = Schemas["UnusableDefinition"];
/** The fields that most people change. */
export type DefinitionForm = Schemas["DefinitionForm"];
export type DefinitionDetail = Schemas["Definition"];
export type TextError = Schemas["DefinitionProblem"];
export type DefinitionPreview = Schemas["DefinitionCheck"];
export type Revision = Schemas["DefinitionRevision"];

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
