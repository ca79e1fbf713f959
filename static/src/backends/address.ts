// The check of an address to install from. Pure; the server and the worker decide.

/** The source of a backend, its name, and a second name. */
export interface Address {
  uri: string;
  name: string;
  alias: string;
}

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;
const LONGEST_ADDRESS = 1024;
const LONGEST_NAME = 255;
const BARE_IMAGE = /^([a-z0-9-]+\.)+[a-z]+(:\d+)?\/[a-z0-9._/-]+(:\w[\w.-]*|@sha256:[0-9a-f]{64})$/;

/** True if it is an image in a registry. */
export function isImage(uri: string): boolean {
  return uri.startsWith("oci://") || BARE_IMAGE.test(uri);
}

/** Why it cannot be sent, and the field to change; null if it can. */
export function addressProblem({ uri, name, alias }: Address): { field: keyof Address; text: string } | null {
  const where = uri.trim();
  if (where === "") return { field: "uri", text: "Enter an address." };
  if (where.length > LONGEST_ADDRESS) return { field: "uri", text: `Enter an address of at most ${LONGEST_ADDRESS} characters.` };
  if (!where.includes("://") && !where.startsWith("/") && !isImage(where)) return { field: "uri", text: "Enter an image, a URL or a path that begins with /." };
  for (const [field, entered] of [["name", name.trim()], ["alias", alias.trim()]] as const) {
    if (entered !== "" && (!NAME.test(entered) || entered.length > LONGEST_NAME)) return { field, text: "Use only letters, digits, dots, hyphens and underscores in the name." };
  }
  return name.trim() === "" && isImage(where) ? { field: "name", text: "Enter a name. An image has no name of its own." } : null;
}

/** The name of the installation, or else the address. */
export function keyOf(address: Address): string {
  return address.name !== "" ? address.name : address.uri;
}
