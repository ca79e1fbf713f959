"""Routes of the page's start in addition to the session: features, branding, version (`http-api.md` §5.4)."""

from typing import Any

from drf_spectacular.utils import OpenApiResponse
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

import localai_cluster
from localai_cluster.accounts.authentication import IsUser
from localai_cluster.web.openapi import describe, extend_schema, response_example


class FeaturesSerializer(serializers.Serializer[Any]):
    """The features of the reference, each with true if this product has it."""

    agents = serializers.BooleanField()
    mcp = serializers.BooleanField()
    fine_tuning = serializers.BooleanField()
    quantization = serializers.BooleanField()
    distributed = serializers.BooleanField()
    localai_assistant = serializers.BooleanField()


class BrandingSerializer(serializers.Serializer[Any]):
    """Name and pictures; an empty text stands for the built-in."""

    instance_name = serializers.CharField(allow_blank=True)
    instance_tagline = serializers.CharField(allow_blank=True)
    logo_url = serializers.CharField(allow_blank=True)
    logo_horizontal_url = serializers.CharField(allow_blank=True)
    favicon_url = serializers.CharField(allow_blank=True)


class VersionSerializer(serializers.Serializer[Any]):
    """The version of the product."""

    version = serializers.CharField()


FEATURES_EXAMPLE = {**dict.fromkeys(FeaturesSerializer().fields, False), "distributed": True}
BRANDING_EXAMPLE = dict.fromkeys(BrandingSerializer().fields, "")
VERSION_EXAMPLE = response_example({"version": "0.1.0"})


class FeaturesView(APIView):
    """`/api/features`."""

    permission_classes = [IsUser]

    @describe(
        "features",
        "List supported features",
        FeaturesSerializer,
        refused=(403,),
        examples=[response_example(FEATURES_EXAMPLE)],
        tag="session",
    )
    def get(self, request: Request) -> Response:
        """The features of the reference that this product supports (§5.1)."""
        return Response(FEATURES_EXAMPLE)


class BrandingView(APIView):
    """`/api/branding`."""

    authentication_classes: list[Any] = []
    permission_classes: list[Any] = []

    @extend_schema(
        operation_id="branding",
        summary="Show name and logos",
        tags=["session"],
        auth=[],
        responses={200: OpenApiResponse(BrandingSerializer, "Everything built-in.")},
        examples=[response_example(BRANDING_EXAMPLE)],
    )
    def get(self, request: Request) -> Response:
        """The built-in name and logos; they cannot be customised."""
        return Response(BRANDING_EXAMPLE)


class VersionView(APIView):
    """`/version`."""

    permission_classes = [IsUser]

    @describe(
        "version",
        "Show the version",
        VersionSerializer,
        refused=(403,),
        examples=[VERSION_EXAMPLE],
        tag="session",
    )
    def get(self, request: Request) -> Response:
        """The version of the product."""
        return Response({"version": localai_cluster.__version__})
