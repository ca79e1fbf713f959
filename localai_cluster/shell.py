"""Routes of the page's start in addition to the session: features, branding, version (`http-api.md` §5.4)."""

from typing import Any

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

import localai_cluster
from localai_cluster.accounts import session_shapes as shapes
from localai_cluster.accounts.authentication import IsUser
from localai_cluster.web.openapi import refusals


class FeaturesView(APIView):
    """`/api/features`."""

    permission_classes = [IsUser]

    @extend_schema(
        operation_id="features",
        summary="List supported features",
        tags=["session"],
        responses={200: shapes.FeaturesSerializer, **refusals(401, 403)},
        examples=[shapes.FEATURES],
    )
    def get(self, request: Request) -> Response:
        """The features of the reference that this product supports (§5.1)."""
        names = shapes.FeaturesSerializer().fields.keys()
        return Response({**dict.fromkeys(names, False), "distributed": True})


class BrandingView(APIView):
    """`/api/branding`."""

    authentication_classes: list[Any] = []
    permission_classes: list[Any] = []

    @extend_schema(
        operation_id="branding",
        summary="Show name and logos",
        tags=["session"],
        auth=[],
        responses={200: OpenApiResponse(shapes.BrandingSerializer, "Everything built-in.")},
        examples=[shapes.BRANDING],
    )
    def get(self, request: Request) -> Response:
        """The built-in name and logos; they cannot be customised."""
        return Response(dict.fromkeys(shapes.BrandingSerializer().fields, ""))


class VersionView(APIView):
    """`/version`."""

    permission_classes = [IsUser]

    @extend_schema(
        operation_id="version",
        summary="Show the version",
        tags=["session"],
        responses={200: shapes.VersionSerializer, **refusals(401, 403)},
        examples=[shapes.VERSION],
    )
    def get(self, request: Request) -> Response:
        """The version of the product."""
        return Response({"version": localai_cluster.__version__})
