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
export type Source = Schemas["SourceInspection"];
export type SourceVariant = Schemas["ModelVariant"];
export type Catalogue = Schemas["ModelCatalogue"];
export type CatalogueModel = Schemas["CatalogueModel"];
export type ImportStarted = Schemas["ImportStarted"];
